"""Decides who may take part: turns an agent's greeting into a member of the fleet, a return, or a refusal.

Called by `runtime.controller` for the first message of every connection.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from rerail.config import JobSpec
from rerail.runtime.fleet import Agent, Fleet, Link
from rerail.runtime.wire import AgentHello

LAST_CALL_S = 1.0
"""With --nnodes MIN:MAX, how long to wait for more nodes once MIN are there."""
PATIENCE_S = 3.0
"""After this long without enough nodes the user is told what the job waits for, once."""
DUPLICATE_S = 3.0
"""A second agent of the same name is a duplicate if the first was heard this recently (three beats), else its successor."""


@dataclass(frozen=True)
class Greeting:
    """What became of a greeting."""

    agent: Agent | None = None
    refusal: str = ""
    replaced: Agent | None = None
    """The former process of this node's agent, whose ranks are gone."""
    returned: bool = False
    """The same process, back after its connection broke or the controller changed."""


class Admission:
    """The door. Closed once every place is taken; open again when a node is lost."""

    def __init__(self, fleet: Fleet, spec: JobSpec, token: str) -> None:
        self._fleet, self._spec, self._token = fleet, spec, token
        self._min_since: float | None = None
        self._arrivals = 0
        self._first_at: float | None = None
        self._told = False

    def greet(self, link: Link, hello: AgentHello, now: float) -> Greeting:
        """Admit, take back or refuse."""
        refusal = self._refusal(hello, now)
        if refusal:
            return Greeting(refusal=refusal)
        known = self._fleet.agents.get(hello.node)
        if known is not None and known.incarnation == hello.incarnation:
            known.link, known.gone_since, known.heard = link, None, now
            known.address, known.ready = hello.address, hello.standbys_ready
            known.depot_port = hello.depot_port
            return Greeting(agent=known, returned=True)
        self._arrivals += 1
        self._first_at = now if self._first_at is None else self._first_at
        agent = Agent(
            node=hello.node,
            address=hello.address,
            slots=hello.slots,
            node_rank=hello.node_rank,
            incarnation=hello.incarnation,
            heard=now,
            link=link,
            arrival=known.arrival if known is not None else self._arrivals,
            ready=hello.standbys_ready,
            depot_port=hello.depot_port,
        )
        self._fleet.agents[hello.node] = agent
        if len(self._fleet.connected()) >= self._spec.min_nodes and self._min_since is None:
            self._min_since = now
        return Greeting(agent=agent, replaced=known)

    def complete(self, now: float) -> bool:
        """Whether the job can be placed and started."""
        here = len(self._fleet.connected())
        if here >= self._spec.max_nodes:
            return True
        if here < self._spec.min_nodes:
            self._min_since = None
        return self._min_since is not None and now >= self._min_since + LAST_CALL_S

    def notice(self, now: float) -> str:
        """What to tell the user about nodes that do not come; once, and else nothing."""
        here, spec = [agent.node for agent in self._fleet.connected()], self._spec
        if self._told or self._first_at is None or now < self._first_at + PATIENCE_S or len(here) >= spec.min_nodes:
            return ""
        self._told = True
        return (
            f"waiting for nodes: {len(here)} of {spec.min_nodes} here ({', '.join(here) or 'none'})\n"
            f"  start the others: rerail run --nnodes {spec.min_nodes} --rdzv-id {spec.job} "
            f"--rdzv-endpoint {spec.endpoint_host}:{spec.endpoint_port} --node-rank N ..."
        )

    def next_deadline(self) -> float | None:
        if self._min_since is not None:
            return self._min_since + LAST_CALL_S
        return None if self._told or self._first_at is None else self._first_at + PATIENCE_S

    def node_rank(self, agent: Agent) -> int:
        """Its place among the nodes, as far as it is known."""
        order = list(self._fleet.placed()) or list(self._fleet.agents)
        return order.index(agent.node) if agent.node in order else agent.node_rank

    def _refusal(self, hello: AgentHello, now: float) -> str:
        if hello.job != self._spec.job:
            return f"this controller runs job {self._spec.job}, not {hello.job}; check --rdzv-id and --rdzv-endpoint"
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the token is wrong; set the same RERAIL_TOKEN on every node"
        if hello.slots < 1:
            return f"node {hello.node} offers {hello.slots} ranks; at least 1 is needed"
        known = self._fleet.agents.get(hello.node)
        if known is not None:
            duplicate = known.incarnation != hello.incarnation and known.connected and now - known.heard < DUPLICATE_S
            return f"a node named {hello.node} takes part already" if duplicate else ""
        placed = self._fleet.placed()
        missing = [node for node in placed if node in self._fleet.agents and not self._fleet.agents[node].connected]
        if placed and not missing:
            return f"job {self._spec.job} has all its {len(placed)} nodes"
        if len(self._fleet.connected()) >= self._spec.max_nodes:
            return f"job {self._spec.job} has {self._spec.max_nodes} nodes already (--nnodes)"
        return ""
