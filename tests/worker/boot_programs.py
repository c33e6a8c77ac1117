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
SURROUNDINGS = """
import asyncio, atexit, contextvars, ctypes, decimal, faulthandler, gc, io, locale, logging
import multiprocessing, os, random, resource, signal, socket, sys, tempfile, threading, time
import tracemalloc, warnings
limits = sorted(name for name in vars(resource) if name.startswith("RLIMIT"))
print([(name, resource.getrlimit(getattr(resource, name))) for name in limits])
print(os.nice(0), os.sched_getaffinity(0), os.sched_getscheduler(0), os.getpriority(0, 0))
status = open("/proc/self/status").read().splitlines()
print([line for line in status if line.startswith(("Name", "Cap", "NoNew", "Seccomp", "Umask",
       "Groups", "Threads", "SigBlk", "Uid", "Gid"))])
print(open("/proc/self/oom_score_adj").read(), open("/proc/self/cgroup").read(), os.getcwd())
print(sorted(os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")))
print(threading.active_count(), threading.main_thread() is threading.current_thread(),
      threading.stack_size(), threading.main_thread().native_id == os.getpid(),
      threading.excepthook is threading.__excepthook__)
root = logging.getLogger()
print(root.handlers, root.level, logging.root.manager.disable, logging.lastResort.level,
      logging.getLoggerClass(), logging.raiseExceptions)
print([one for one in warnings.filters if "numpy" not in str(one)])
print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags())
print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks, tracemalloc.is_tracing())
print(faulthandler.is_enabled(), sys.gettrace(), sys.getprofile(), sys.excepthook.__name__,
      sys.displayhook.__name__, sys.breakpointhook.__name__, sys.unraisablehook.__name__)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering,
          stream.write_through, stream.isatty(), stream.closed, stream is not None)
print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)
print(locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding())
print(decimal.getcontext(), len(contextvars.copy_context()), socket.getdefaulttimeout())
print(tempfile.tempdir, tempfile.gettempdir(), type(asyncio.get_event_loop_policy()).__name__)
print(multiprocessing.current_process().name, multiprocessing.parent_process(),
      multiprocessing.get_start_method(allow_none=True), multiprocessing.active_children(),
      multiprocessing.current_process()._identity, len(multiprocessing.current_process().authkey))
print(signal.getitimer(signal.ITIMER_REAL), signal.alarm(0), signal.set_wakeup_fd(-1))
print(time.process_time() < 5, time.tzname, os.getppid() > 0, os.WNOHANG, resource.getpagesize())
print([os.readlink(f"/proc/self/fd/{n}") for n in "012"][:1], os.get_inheritable(0))
for number in range(3, 200):
    try:
        print(number, os.readlink(f"/proc/self/fd/{number}"))
    except FileNotFoundError:
        pass
random.seed(3), print(random.random())
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no children")
print(sys.path, sys.path_hooks, [type(one).__name__ for one in sys.meta_path], sys.pycache_prefix,
      sys.dont_write_bytecode, sys.platlibdir, sys.exec_prefix, sys.executable,
      sorted(sys._xoptions), sys.warnoptions)
"""
TORCH = """
import os, sys, torch, numpy
import torch.distributed as dist
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index * index, torch.utils.data.get_worker_info().id])

if __name__ == "__main__":
    print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype())
    print(torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
          torch.get_float32_matmul_precision(), torch.get_default_device())
    print(torch.backends.mkldnn.enabled, torch.multiprocessing.get_sharing_strategy(),
          torch.cuda.is_available(), torch.cuda.is_initialized(), dist.is_initialized())
    print(numpy.geterr(), numpy.get_printoptions())
    for line in torch.__config__.parallel_info().splitlines():
        print(line)
    torch.manual_seed(7), numpy.random.seed(7)
    weights = torch.rand(300, 300, requires_grad=True)
    (weights @ weights).relu().mean().backward()
    print(weights.grad.double().sum(), numpy.random.rand(), torch.randperm(5), torch.initial_seed())
    print([batch.tolist() for batch in DataLoader(Squares(), 2, num_workers=2)])
"""
