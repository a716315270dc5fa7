"""Work that several processes share: each takes the next piece that nobody has."""

import os
import pickle
import signal
import struct
import sys
import traceback


def shared_out(workers, pieces, work):
    """Has `workers` forked processes call `work(worker, taken)`, where `taken` yields numbers below `pieces`, each one in
    one process only, and returns what the calls returned, None for a process that ended otherwise. A signal that ends
    this process ends them first."""
    numbers, filled = os.pipe()
    os.set_blocking(filled, False)
    os.write(filled, b"".join(struct.pack("H", n) for n in range(pieces)))
    os.close(filled)

    def taken():
        while piece := os.read(numbers, 2):
            yield struct.unpack("H", piece)[0]

    sys.stdout.flush()
    children, readers = [], []

    def stop(number, _frame):
        for pid in children:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        raise SystemExit(128 + number)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(s, stop) for s in caught]
    try:
        for worker in range(workers):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _in_worker(writer, [reader, *readers], lambda: work(worker, taken()))
            os.close(writer)
            children.append(pid)
            readers.append(reader)
        results = []
        for reader in readers:
            with os.fdopen(reader, "rb") as pipe:
                answer = pipe.read()
            results.append(pickle.loads(answer) if answer else None)
    finally:
        for sig in caught:
            signal.signal(sig, signal.SIG_IGN)
        for pid in children:
            os.waitpid(pid, 0)
        for sig, handler in zip(caught, before):
            signal.signal(sig, handler)
        os.close(numbers)
    return results


def _in_worker(writer, others, work):
    code = 1
    try:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_DFL)
        for fd in others:
            os.close(fd)
        answer = pickle.dumps(work())
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (said, and told by the missing answer)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)
