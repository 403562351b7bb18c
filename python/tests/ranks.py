"""Tests over several processes: ranks of one torch.distributed group, that start and leave together."""

import faulthandler
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(work, size, folder, *args, **group):
    """work(rank, *args) on `size` ranks; `group` goes to init_process_group, whose backend is gloo.

    A rank that raises, or dies, fails the test with what every rank wrote to its stderr: of one that
    a signal ended, its stacks.
    """
    try:
        mp.spawn(_rank, args=(work, size, folder, args, group), nprocs=size)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        said = (f"rank {r}:\n{_stderr(folder, r).read_text()}" for r in range(size))
        raise AssertionError("\n".join((str(error), *said))) from None


def _stderr(folder, rank):
    return folder / f"stderr.{rank}"


def _rank(rank, work, size, folder, args, group):
    with _stderr(folder, rank).open("w") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    torch.set_num_threads(1)
    group = {"backend": "gloo", "init_method": f"file://{folder / 'store'}", **group}
    if group["backend"] == "nccl":
        torch.cuda.set_device(rank)
        group["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(rank=rank, world_size=size, **group)
    work(rank, *args)
    dist.barrier()  # nobody closes a socket that another still reads
    dist.destroy_process_group()
    sys.stdout.flush()
    # As multiprocessing ends a process that it forked: how Python takes itself down while threads of
    # PyTorch still run is not what these tests judge.
    os._exit(0)
