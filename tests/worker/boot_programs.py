"""Programs that look at how they were started: none prints what differs from run to run."""

from __future__ import annotations

NAMESPACE = """
import os, sys
main = sys.modules["__main__"]
assert main.__dict__ is globals()
for name, value in [*globals().items()]:
    if name not in ("os", "sys", "main", "name", "value"):
        print(name, type(value).__name__ if name == "__loader__" else value)
print(type(__loader__).__name__, getattr(__loader__, "path", None), __builtins__)
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.meta_path[-3:], os.getcwd())
print([number for number in range(3, 64) if os.path.exists(f"/proc/self/fd/{number}")])
print(os.readlink("/proc/self/fd/0"), sys.stdin.read(), sys.stdout.line_buffering)
print(os.getsid(0) == os.getpgid(0) == os.getpid(), open("/proc/self/status").read().count("x"))
"""
SIGNALS = """
import faulthandler, os, signal, numpy  # (OpenBLAS has threads, and they their signal)
print([(number, str(signal.getsignal(number))) for number in sorted(signal.valid_signals())
       if "function" not in str(signal.getsignal(number))])
print(signal.getsignal(2) is signal.default_int_handler, signal.pthread_sigmask(0, []))
print([line for line in open("/proc/self/status") if line.startswith("Sig") and "SigQ" not in line])
mask = os.umask(0)
print(oct(mask), faulthandler.is_enabled())
"""
ENVIRONMENT = """
import ctypes, os, subprocess
print(list(os.environ.items()))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"RANK"), getenv(b"GONE"))
print(subprocess.run("echo $RANK $GONE; env | sort | grep -v ^_", shell=True,
                     capture_output=True, text=True).stdout)
print(type(os.environ).__name__)
"""
ENDINGS = {
    "returns": "print('done')",
    "none": "raise SystemExit",
    "number": "import sys; sys.exit(7)",
    "text": "import sys; sys.exit('a reason')",
    "object": "import sys; sys.exit(('a', 1))",
    "at once": "import os; print('x', end=''); os._exit(9)",
    "signal": "import os; os.kill(os.getpid(), 15)",
    "abort": "import os; os.abort()",
    "interrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "interrupted": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "raises": "def f():\n    raise ValueError('no')\nf()",
    "chained": "def f():\n    {}['a']\ntry:\n    f()\nexcept KeyError as e:\n"
    "    raise ValueError('b') from e",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "group": "raise ExceptionGroup('several', [ValueError(1), KeyError('x')])",
    "no Exception": "class Odd(BaseException): pass\nraise Odd(1)",
    "generator": "raise GeneratorExit",
    "syntax": "def f(:\n    pass",
    "null": "print(1)\n\0",
    "encoding": "# coding: nonsense\nprint(1)",
    "syntax inside": "exec('x = = 1')",
    "import": "import absent_module",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0",
    "bad hook": "import sys\ndef hook(*a):\n    raise RuntimeError('bad')\n"
    "sys.excepthook = hook\n1 / 0",
    "no hook": "import sys\ndel sys.excepthook\n1 / 0",
    "exiting hook": "import sys\nsys.excepthook = lambda *a: sys.exit(5)\n1 / 0",
    "last": "import atexit, sys, traceback\n"
    "atexit.register(lambda: traceback.print_tb(sys.last_traceback))\n1 / 0",
    "atexit": "import atexit, sys\natexit.register(print, 'first')\n"
    "atexit.register(print, 'second')\nprint('end', end=''); sys.exit(3)",
    "bad atexit": "import atexit\natexit.register(lambda: 1 / 0)",
    "namespace": "import atexit, sys\n"
    "atexit.register(lambda: print(sorted(vars(sys.modules['__main__']))))",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()\nprint('main')",
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\n"
    "t.start(); t.join()",
    "finalizers": "class A:\n    def __init__(self, n): self.n = n\n"
    "    def __del__(self): print('del', self.n)\na = A(1); b = A(2); c = [a]; c += [c]",
    "warning": "import warnings\nwarnings.warn('careful')\n"
    "warnings.warn('old', DeprecationWarning)",
    "buffered": "import sys\nsys.stdout.write('no newline'); sys.stderr.write('also')",
    "docstring": "'doc'\nprint(__doc__); x: int = 1; print(__annotations__)",
    "source": "import inspect\nclass A:\n    'a'\ndef f():\n    return 1\n"
    "print(inspect.getsource(f), inspect.getsource(A), inspect.getfile(A))",
    "pickle": "import pickle\nclass A: pass\ndef f(): pass\n"
    "print(type(pickle.loads(pickle.dumps(A()))), pickle.loads(pickle.dumps(f)) is f)",
    "closed": "import os\nos.closerange(3, 256)\nimport decimal\nprint(decimal.Decimal(1))",
}
PROCESSES = """
import multiprocessing, os, subprocess, sys

class Thing:
    def __init__(self, value):
        self.value = value

def double(thing):
    print("in", __name__, thing.value, sys.argv[1:], flush=True)
    return Thing(thing.value * 2)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Thing(1)])[0].value)
    print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)"],
                         capture_output=True, text=True).stdout)
"""
