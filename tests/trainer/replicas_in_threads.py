"""Replicas of a trainer as threads of one process, which add up their gradients over gloo as processes do."""

import asyncio
import datetime
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.ranks import ShardedRanks
from tidemill.trainer.replica_sums import ReplicaSums

LIMIT = datetime.timedelta(seconds=60)


def groups(count):
    """A process group for each of so many threads."""
    store = dist.HashStore()

    def group(replica):
        backend = dist.ProcessGroupGloo(store, replica, count, LIMIT)
        found = dist.ProcessGroup(store, replica, count)
        found._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        found._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return found

    return together(group, count)


def together(function, count):
    """The results of `function(replica)`, each in a thread of its own."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


class Replica(ShardedRanks):
    """One of several ranks that hold all weights, without a meeting of processes."""

    def __init__(self, replica, replicas, group):
        self.rank = self.replica = replica
        self.size = self.replicas = replicas
        self.keeps_copies, self._group = True, group

    def replica_sums(self, parameters, kind):
        return ReplicaSums(parameters, kind, self._group, self.replica, self.replicas)

    def shard(self, *modules):
        pass

    def close(self):
        pass


class Replicas:
    """Trainers that are replicas of one another; every call is made on all of them at once."""

    def __init__(self, count, settings, model, steps=8):
        self._threads = ThreadPoolExecutor(count)
        given = {"steps": steps, "offload": self._offload}
        if count == 1:
            self.trainers = [NativeTrainer(model(), settings, **given)]
        else:
            ranks = [Replica(i, count, group) for i, group in enumerate(groups(count))]
            self.trainers = [NativeTrainer(model(), settings, ranks=each, **given) for each in ranks]

    async def _offload(self, function):
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def all(self, ask):
        """The results of `ask(replica, trainer)`."""
        return await asyncio.gather(*(ask(i, trainer) for i, trainer in enumerate(self.trainers)))

    async def save(self, folder):
        await self.all(lambda i, trainer: trainer.snapshot())
        await self.all(lambda i, trainer: trainer.save(str(folder)))

    async def load(self, folder):
        await self.all(lambda i, trainer: trainer.load(str(folder)))
