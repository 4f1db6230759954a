"""Calls in text by family of models, in the shapes of their published chat templates."""

from __future__ import annotations

WEATHER = {"city": "Hanoi", "days": 3}

#: Family to texts that all call weather(city="Hanoi", days=3).
SHAPES = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}\n</tool_call>',
        "<tool_call>{'name': 'weather', 'arguments': {'city': 'Hanoi', 'days': 3}}</tool_call>",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Hanoi\\", \\"days\\": 3}"}',
        '<tool_call>[{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]</tool_call>',
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]',
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]</TOOLCALL>',
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]</tool_calls>',
        'I look.\n<tool_call>\n{"name": "functions.weather", "arguments": {"city": "Hanoi", '
        '"days": 3}}\n</tool_call>\n<tool_response>sunny</tool_response>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nHanoi\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n</function>\n</tool_call>",
        "<function=weather>\n<parameter=city>\nHanoi\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Hanoi</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    ],
    "glm": [
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Hanoi</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Hanoi</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    ],
    "llama": [
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Hanoi", "days": 3}}',
        '<|python_tag|>weather.call(city="Hanoi", days=3)',
        '<function=weather>{"city": "Hanoi", "days": 3}</function>',
        '{"name": "weather", "parameters": {"city": "Hanoi", "days": 3}}',
        '{"type": "function", "name": "weather", "parameters": {"city": "Hanoi", "days": 3}}',
    ],
    "pythonic": [
        '[weather(city="Hanoi", days=3)]',
        "weather(city='Hanoi', days=3)",
        '<|python_start|>[weather(city="Hanoi", days=3)]<|python_end|>',
        '<function_calls>\nweather(city="Hanoi", days=3)\n</function_calls>',
        '```python\nweather(city="Hanoi", days=3)\n```',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}, '
        '"id": "VvvODy9mT"}]</s>',
        '[TOOL_CALLS]weather[ARGS]{"city": "Hanoi", "days": 3}',
        '[TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Hanoi", "days": 3}',
        '[TOOL_CALLS]weather{"city": "Hanoi", "days": 3}',
    ],
    "deepseek": [
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        '<\uff5ctool\u2581sep\uff5c>weather\n```json\n{"city": "Hanoi", "days": 3}\n```'
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>weather"
        '<\uff5ctool\u2581sep\uff5c>{"city": "Hanoi", "days": 3}'
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ],
    "invoke": [
        '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="weather">\n'
        '<\uff5cDSML\uff5cparameter name="city" string="true">Hanoi</\uff5cDSML\uff5cparameter>\n'
        '<\uff5cDSML\uff5cparameter name="days" string="false">3</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Hanoi</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<function_calls>\n<invoke name="weather">\n<parameter name="city">Hanoi</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</function_calls>',
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Hanoi", "days": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ],
    "harmony": [
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Hanoi", "days": 3}'
        "<|call|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Hanoi", "days": 3}<|call|>',
        "analysisI need the weather.assistantcommentary to=functions.weather json"
        '{"city": "Hanoi", "days": 3}',
    ],
    "functools": ['functools[{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}]'],
    "tool_code": [
        '```tool_code\nweather(city="Hanoi", days=3)\n```',
        '```tool_code\nprint(default_api.weather(city="Hanoi", days=3))\n```',
    ],
    "command": [
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Hanoi", "days": 3}}\n]<|END_ACTION|>',
    ],
    "internlm": [
        '<|action_start|><|plugin|>{"name": "weather", "parameters": {"city": "Hanoi", '
        '"days": 3}}<|action_end|>',
    ],
    "json": [
        '```json\n{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}\n```',
        '{"tool_calls": [{"function": {"name": "weather", "arguments": '
        '"{\\"city\\": \\"Hanoi\\", \\"days\\": 3}"}}]}',
        '{"action": "weather", "action_input": {"city": "Hanoi", "days": 3}}',
    ],
}
