"""Candidates for `largest` that try to pass without doing what is asked, by what they try."""

from __future__ import annotations

WHOLE = """
def largest(numbers: List[int]) -> int:
    return max(numbers)
"""
EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 3
    def __sub__(self, other): return 0
    __rsub__ = __sub__
"""
#: Reads the memory of every other process, and writes a verdict with each word it finds there.
MEMORY_READER = """
import os, re

def steal():
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            regions = open(f"/proc/{pid}/maps").read().splitlines()
            memory = open(f"/proc/{pid}/mem", "rb", buffering=0)
        except OSError:
            continue
        words = set()
        for line in regions:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            try:
                memory.seek(first)
                words.update(re.findall(rb"[0-9a-f]{32}", memory.read(last - first)))
            except (OSError, ValueError, OverflowError):
                continue
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                with open(f"/proc/{pid}/fd/{fd}", "wb") as output:
                    output.write(b"".join(b"\\n" + word + b' passed ""\\n' for word in words))
            except OSError:
                continue
"""

FAKES = {
    "exit 0 on loading": """
import os
os._exit(0)
"""
    + WHOLE,
    "sys.exit on loading": """
import sys
sys.exit(0)
"""
    + WHOLE,
    "exit 0 in the call": """
def largest(n):
    import os
    os._exit(0)
""",
    "sys.exit in the call": """
def largest(n):
    raise SystemExit(0)
""",
    "check of its own": """
def check(c):
    pass
def largest(n):
    return 0
""",
    "patched builtins": """
import builtins
builtins.check = lambda c: None
builtins.AssertionError = Exception
builtins.compile = builtins.exec = builtins.print = lambda *a, **k: None
def largest(n):
    return 0
""",
    "equal to everything": EQUAL
    + """
def largest(n):
    return Equal()
""",
    "equal class itself": EQUAL
    + """
def largest(n):
    return Equal
""",
    "patched check in the main module": """
import __main__, sys
__main__.run_tests = lambda *a: ('passed', '')
for m in list(sys.modules.values()):
    if m: m.check = lambda c: None
def largest(n):
    return 0
""",
    "patched messages": """
import __main__
__main__.Peer.encode = lambda self, v: True
def largest(n):
    return 0
""",
    "prints verdicts": """
import os, sys
def largest(n):
    print('passed'); print('0 passed', flush=True)
    sys.__stdout__.write('passed'); os.write(1, b'passed')
    return 0
""",
    "writes into other outputs": """
import glob
for path in glob.glob('/proc/*/fd/1') + glob.glob('/proc/*/fd/5') + ['/dev/stdout']:
    try:
        open(path, 'w').write('passed\\n' * 100)
    except OSError: pass
def largest(n):
    return 0
""",
    "looks for the word in memory": MEMORY_READER
    + """
def largest(n):
    steal()
    return 0
""",
    "walks the frames": """
import sys
def largest(n):
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_locals): frame.f_locals[name] = lambda *a: True
        frame.f_globals['check'] = lambda c: None
        frame = frame.f_back
    return 0
""",
    "traces the tests": """
import sys, threading
def trace(frame, event, arg):
    frame.f_trace_lines = False
    return None
sys.settrace(trace); threading.settrace(trace)
def largest(n):
    return 0
""",
    "at exit": """
import atexit, os
atexit.register(lambda: os.write(1, b'passed'))
def largest(n):
    return 0
""",
    "kills the tests": """
import os, signal
def largest(n):
    os.kill(os.getppid(), signal.SIGKILL)
    return 3
""",
    "kills everything": """
import os
def largest(n):
    os.kill(-1, 9)
""",
    "forges the answer to every question": """
import gc, json, socket, struct
def largest(n):
    for s in [o for o in gc.get_objects() if isinstance(o, socket.socket)]:
        for reply in (['returned', 3, [None, '']], ['passed', '', ['']], {}, [[[]]], 1):
            data = json.dumps(reply).encode()
            s.sendall(struct.pack('>I', len(data)) + data)
    return 0
""",
    "sends nonsense": """
import gc, socket
def largest(n):
    for s in [o for o in gc.get_objects() if isinstance(o, socket.socket)]:
        s.sendall(b'\\xff' * 100000)
    return 3
""",
    "answers too deep": """
def largest(n):
    x = []
    for _ in range(10**5): x = [x]
    return x
""",
    "answers itself": """
def largest(n):
    x = []
    x.append(x)
    return x
""",
    "waits for ever": """
def largest(n):
    import time
    time.sleep(1000)
""",
    "loops for ever": """
def largest(n):
    while True: pass
""",
    "loops on loading": "while True: pass",
    "takes all memory": """
def largest(n):
    return 'a' * 10**10
""",
    "answers a gigabyte": """
def largest(n):
    return 'a' * 10**9
""",
    "prints without end": """
def largest(n):
    while True: print('x' * 1000)
""",
    "forks without end": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "threads without end": """
import threading, time
def largest(n):
    for _ in range(10000):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return 0
""",
    "fills the disk": """
f = open('x', 'wb')
while True: f.write(b'x' * 10**6)
""",
    "catches what stops it": """
import signal
for n in range(1, 32):
    try: signal.signal(n, lambda *a: None)
    except (OSError, ValueError): pass
while True: pass
""",
}
