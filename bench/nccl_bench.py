# What: starts talea_nccl_bench, a process a GPU, for a list of lanes, worlds and vocabularies.
# Why: the receipts of receipts/ranks come from one command on one machine.
# Never: runs two worlds on one GPU at a time, or goes on silently after one that failed.
import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}  # no multicast: a choice of the machine's, not of Talea's


class Devices:
    """The GPUs of the machine; a run takes as many as it has ranks."""

    def __init__(self, count):
        self.free = list(range(count))
        self.changed = threading.Condition()

    def take(self, count):
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            taken, self.free = self.free[:count], self.free[count:]
            return taken

    def give_back(self, taken):
        with self.changed:
            self.free = sorted(self.free + taken)
            self.changed.notify_all()


def run_world(options, devices, ranks, mode, lane, receipt, arguments):
    """All ranks of one world; its output, and whether every rank ended well."""
    taken = devices.take(ranks)
    world = "talea-" + uuid.uuid4().hex[:12]
    jobs, said = [], []
    for rank, device in enumerate(taken):
        command = [options.program, mode, str(rank), str(ranks), world, options.library, lane]
        command += [receipt, *map(str, arguments)]
        environment = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(device)}
        said.append(tempfile.TemporaryFile("w+"))
        jobs.append(
            subprocess.Popen(
                command, stdout=said[-1], stderr=subprocess.STDOUT, text=True, env=environment
            )
        )
    end = time.monotonic() + options.timeout
    for job in jobs:
        try:
            job.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    devices.give_back(taken)
    texts = []
    for file in said:
        file.seek(0)
        texts.append(file.read())
    right = all(job.returncode == 0 for job in jobs)
    print("\n".join(texts) if not right else texts[0], flush=True)
    print(f"{mode} {lane} {ranks} ranks {arguments}: {'passed' if right else 'FAILED'}", flush=True)
    return right


def runs_of(options):
    """(ranks, mode, lane, receipt, arguments) of every world."""
    for ranks in options.ranks:
        for lane in options.lanes:
            if options.train:
                yield ranks, "train", lane, f"train_{ranks}.json", [options.train]
                continue
            for vocab, limit in options.shapes:
                variants = ",".join(
                    v for v in options.variants.split(",") if lane == "sm90" or "bf16" not in v
                )
                shape = [options.tokens, options.hidden, vocab, limit, variants]
                yield ranks, "speed", lane, f"{lane}_{ranks}_v{vocab}.json", shape


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--library", default="libnccl.so.2")
    parser.add_argument("--lanes", nargs="+", default=["sm90"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["128256:530"],
        help="VOCAB:LIMIT, the workspace limit in MiB",
    )
    parser.add_argument("--variants", default="beside:8,once:0,silent:8,bf16:8")
    parser.add_argument("--train", type=int, default=0, help="words: train instead of timing")
    parser.add_argument("--receipts", help="folder; none: no receipts")
    parser.add_argument("--devices", type=int, default=0, help="of the machine; as many as a world")
    parser.add_argument("--timeout", type=float, default=200, help="seconds for one world")
    options = parser.parse_args()
    options.shapes = [shape.split(":") for shape in options.shapes]
    devices = Devices(options.devices or max(options.ranks))
    results, threads = [], []

    def go(ranks, mode, lane, receipt, arguments):
        file = os.path.join(options.receipts, receipt) if options.receipts else "-"
        results.append(run_world(options, devices, ranks, mode, lane, file, arguments))

    for run in runs_of(options):
        threads.append(threading.Thread(target=go, args=run))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
