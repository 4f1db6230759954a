"""The same agent in each framework, as its documents write it: one tool, one question.

None of them knows the pipeline: each gets the endpoint as it would get any server's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

from workers.core.endpoint import Endpoint
from workers.core.registry import register_agent


@register_agent("openai_agents_responses")
async def openai_agents_responses(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from agents import OpenAIResponsesModel

    return await _openai_agents(prompt, endpoint, OpenAIResponsesModel)


@register_agent("openai_agents_chat")
async def openai_agents_chat(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from agents import OpenAIChatCompletionsModel

    return await _openai_agents(prompt, endpoint, OpenAIChatCompletionsModel)


async def _openai_agents(prompt: dict[str, Any], endpoint: Endpoint, model_class: Any) -> str:
    import agents
    import openai

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = model_class(endpoint.model, client)
    agents.set_tracing_disabled(True)
    agent = agents.Agent("Adder", model=model, tools=[add])
    result = agents.Runner.run_streamed(agent, prompt["content"])
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


@register_agent("langgraph")
async def langgraph(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = create_react_agent(model, [add])
    state = await agent.ainvoke({"messages": [("user", prompt["content"])]})
    return state["messages"][-1].content


@register_agent("strands")
async def strands(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    model = OpenAIModel(
        client_args={"base_url": endpoint.base_url, "api_key": endpoint.api_key},
        model_id=endpoint.model,
    )
    agent = Agent(model=model, tools=[add], callback_handler=None)
    return str(await asyncio.to_thread(agent, prompt["content"])).strip()


@register_agent("pydantic_ai")
async def pydantic_ai(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = Agent(OpenAIChatModel(endpoint.model, provider=provider))

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return (await agent.run(prompt["content"])).output


@register_agent("smolagents")
async def smolagents(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
    from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    model = OpenAIServerModel(
        model_id=endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key
    )
    agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=LogLevel.OFF)
    return str(await asyncio.to_thread(agent.run, prompt["content"]))
