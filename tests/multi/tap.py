"""Cases of a test program in Python: each prints one TAP line."""
import subprocess
import sys
import traceback


class Skip(Exception):
    pass


def run_cases(cases):
    """Runs functions; a case passes when it returns, fails when it raises, is skipped when it raises Skip. Exits."""
    print(f"1..{len(cases)}")
    failed = 0
    for number, case in enumerate(cases, 1):
        name = case.__name__
        try:
            case()
            print(f"ok {number} - {name}", flush=True)
        except Skip as reason:
            print(f"ok {number} - {name} # SKIP {reason}", flush=True)
        except Exception:
            failed += 1
            print(f"not ok {number} - {name}")
            print("# " + traceback.format_exc().replace("\n", "\n# "), flush=True)
    sys.exit(1 if failed else 0)


def call(*command, timeout=60, env=None, cwd=None):
    """Runs a command; returns (exit code, stdout, stderr)."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd,
                            stdin=subprocess.DEVNULL)
    return result.returncode, result.stdout, result.stderr


def expect(condition, *told):
    if not condition:
        raise AssertionError("\n".join(str(word) for word in told))
