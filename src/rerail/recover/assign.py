"""Turns the fleet into assignments and plans: who is which rank, with the environment torchrun would have set.

Called by `recover.execute` when ranks are started or replaced. Pure.
"""

from __future__ import annotations

from rerail.config import DEPOTS, JobSpec
from rerail.planner.outlook import Outlook
from rerail.recover.plan import Choice
from rerail.runtime.fleet import Fleet, Rank
from rerail.runtime.plans import Plan
from rerail.runtime.wire import Assign


def environment(
    fleet: Fleet, rank: Rank, spec: JobSpec, master: tuple[str, int], restarts: tuple[int, int]
) -> dict[str, str]:
    """torchrun's variables for this rank; `restarts` is (used, allowed)."""
    nodes = fleet.placed()
    world = len(fleet.ranks)
    values: dict[str, str | int] = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": nodes[rank.node],
        "GROUP_RANK": list(nodes).index(rank.node),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_RANK": rank.rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RESTART_COUNT": restarts[0],
        "TORCHELASTIC_MAX_RESTARTS": restarts[1],
        "TORCHELASTIC_RUN_ID": spec.job,
        # rank 0 of the script itself opens the store; there is no store of an agent to share
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if found := depots(fleet):
        values[DEPOTS] = found
    return {name: str(value) for name, value in values.items()}


def depots(fleet: Fleet) -> str:
    """host:port of every node's depot, in the order of the nodes; empty if not all of them have one."""
    agents = [fleet.agents[node] for node in fleet.placed()]
    if not all(agent.depot_port for agent in agents):
        return ""
    return ",".join(f"{agent.address}:{agent.depot_port}" for agent in agents)


def assignment(
    fleet: Fleet, rank: Rank, env: dict[str, str], *, store_rank: int, newcomer: bool, restored: bool
) -> Assign:
    """The order that makes a process this rank, in the fleet's newest generation."""
    return Assign(
        generation=fleet.generation,
        rank=rank.rank,
        world_size=len(fleet.ranks),
        newcomer=newcomer,
        restored=restored,
        store_rank=store_rank,
        address=fleet.agent_of(rank.rank).address,
        env=env,
        back=fleet.back,
    )


def plan_of(fleet: Fleet, choice: Choice, store: tuple[int, int], *, leaving: bool, outlook: Outlook) -> Plan:
    """The plan of the newest generation; `store` is the rank that serves it, and its port."""
    members = tuple(rank.rank for rank in fleet.members())
    return Plan(
        generation=fleet.generation,
        world_size=len(fleet.ranks),
        store_host=fleet.agent_of(store[0]).address,
        store_port=store[1],
        store_rank=store[0],
        version=choice.version,
        depots=depots(fleet),
        back=fleet.back,
        leaving=leaving,
        healing=choice.healing,
        nodes=tuple(list(fleet.placed()).index(rank.node) for rank in fleet.ranks.values()),
        members=members if len(members) < len(fleet.ranks) else (),
        outlook=outlook,
        sources=choice.sources,
    )
