"""Decides who may take part: turns an agent's greeting into a member of the fleet, a return, or a refusal.

Called by `runtime.controller` for the first message of every connection.
"""

from __future__ import annotations

import hmac
import sys
from dataclasses import dataclass

from rerail.config import JobSpec
from rerail.runtime.fleet import Agent, Fleet, Link
from rerail.runtime.orders import AgentHello, Rejected
from rerail.wording import counted

LAST_CALL_S = 1.0
"""With --nnodes MIN:MAX, how long to wait for more nodes once MIN are there."""
PATIENCE_S = 3.0
"""After this long without enough nodes the user is told what the job waits for, once."""
DUPLICATE_S = 3.0
"""A second agent of the same name is a duplicate if the first was heard this recently (three beats), else its successor."""
KNOCKING_S = 2 * DUPLICATE_S
"""So long one from the same address may ask again: where a link was down, nobody knows yet that the first is gone."""


@dataclass(frozen=True)
class Greeting:
    """What became of a greeting."""

    agent: Agent | None = None
    refusal: str = ""
    replaced: Agent | None = None
    """The former process of this node's agent, whose ranks are gone."""
    returned: bool = False
    """The same process, back after its connection broke or the controller changed."""

    def turn_away(self, link: Link) -> None:
        """For good, with the reason; or, without a word, until it asks again."""
        if self.refusal:
            link.send(Rejected(reason=self.refusal))
        else:
            link.close()


class Admission:
    """The door. Closed once every place is taken; open again when a node is lost."""

    def __init__(self, fleet: Fleet, spec: JobSpec, token: str, lost_s: float = 0.0, node_wait_s: float = 30.0) -> None:
        self._fleet, self._spec, self._token, self._lost_s = fleet, spec, token, lost_s
        self._node_wait_s = node_wait_s
        self._most = spec.max_nodes + spec.spare_nodes
        self._min_since: float | None = None
        self._spared_since: float | None = None
        """Since when there are enough nodes only together with those that are to be spares."""
        self._arrivals = 0
        self._first_at: float | None = None
        self._told = False
        self._knocked: dict[str, float] = {}
        """When an agent that may be the successor of another was first heard, by incarnation."""

    def greet(self, link: Link, hello: AgentHello, now: float) -> Greeting:
        """Admit, take back or refuse."""
        refusal = self._refusal(hello, now)
        known = self._fleet.agents.get(hello.node)
        if refusal:
            return Greeting(refusal="" if self._too_early(hello, known, now) else refusal)
        self._knocked.clear()
        if known is not None and known.incarnation == hello.incarnation:
            known.link, known.gone_since, known.heard = link, None, now
            known.address, known.ready = hello.address, hello.standbys_ready
            known.slots, known.devices, known.depot_port = hello.slots, hello.devices, hello.depot_port
            known.resets, known.accelerators = hello.resets, hello.accelerators
            return Greeting(agent=known, returned=True)
        self._arrivals += 1
        self._first_at = now if self._first_at is None else self._first_at
        agent = Agent(
            node=hello.node,
            address=hello.address,
            slots=hello.slots,
            devices=max(hello.devices, hello.slots),
            resets=hello.resets,
            accelerators=hello.accelerators,
            node_rank=hello.node_rank,
            incarnation=hello.incarnation,
            heard=now,
            link=link,
            arrival=known.arrival if known is not None else self._arrivals,
            ready=hello.standbys_ready,
            depot_port=hello.depot_port,
        )
        self._fleet.agents[hello.node] = agent
        if len(self._members()) >= self._spec.min_nodes and self._min_since is None:
            self._min_since = now
        return Greeting(agent=agent, replaced=known)

    def complete(self, now: float) -> bool:
        """Whether the job can be placed and started."""
        here, enough = len(self._members()), self._spec.min_nodes
        if here >= self._spec.max_nodes:
            return True
        if here >= enough:
            return self._min_since is not None and now >= self._min_since + LAST_CALL_S
        self._min_since = None
        if len(self._fleet.connected()) < enough:
            self._spared_since = None
        elif self._spared_since is None:
            self._spared_since = now
        return self._spared_since is not None and now >= self._spared_since + self._node_wait_s

    def _members(self) -> list[Agent]:
        """Nodes that ranks are to be on. Where there are spares, those whose --node-rank lies beyond --nnodes are spares."""
        last = self._spec.max_nodes if self._spec.spare_nodes else sys.maxsize
        return [agent for agent in self._fleet.connected() if agent.node_rank < last]

    def notice(self, now: float) -> str:
        """What to tell the user about nodes that do not come; once, and else nothing."""
        here, spec = [agent.node for agent in self._members()], self._spec
        if self._told or self._first_at is None or now < self._first_at + PATIENCE_S or len(here) >= spec.min_nodes:
            return ""
        self._told = True
        spares = [agent.node for agent in self._fleet.connected() if agent.node not in here]
        instead = f"\n  {', '.join(spares)}: spare, used instead after {self._node_wait_s:g} s" if spares else ""
        return (
            f"waiting for nodes: {len(here)} of {spec.min_nodes} here ({', '.join(here) or 'none'})\n"
            f"  start the others: rerail run --nnodes {spec.min_nodes} --rdzv-id {spec.job} "
            f"--rdzv-endpoint {spec.endpoint_host}:{spec.endpoint_port} --node-rank N ...{instead}"
        )

    def next_deadline(self) -> float | None:
        if self._min_since is not None:
            return self._min_since + LAST_CALL_S
        told = None if self._told or self._first_at is None else self._first_at + PATIENCE_S
        spared = None if self._spared_since is None else self._spared_since + self._node_wait_s
        return min((time for time in (told, spared) if time is not None), default=None)

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
            # another machine: the ranks of the first may run until its lease is over
            elsewhere = known.address not in ("", hello.address) and now - known.heard < self._lost_s
            duplicate = known.incarnation != hello.incarnation and (elsewhere or _is_there(known, now))
            return f"a node named {hello.node} takes part already" if duplicate else ""
        placed = self._fleet.placed()
        missing = [node for node in placed if node in self._fleet.agents and not self._fleet.agents[node].connected]
        here = len(self._fleet.connected())
        if here < self._most and (not placed or missing or self._most > self._spec.max_nodes):
            return ""
        if placed and not missing:
            return f"job {self._spec.job} has all its {len(placed)} nodes{self._and_spares()}"
        return f"job {self._spec.job} has {here} nodes already (--nnodes{self._and_spares()})"

    def _too_early(self, hello: AgentHello, known: Agent | None, now: float) -> bool:
        """Whether a second agent of this name is told to ask again: the first may have died behind a link that was down."""
        if not self._spec.several_nodes or known is None or known.address != hello.address or not _is_there(known, now):
            return False
        right = hello.job == self._spec.job and hmac.compare_digest(hello.token.encode(), self._token.encode())
        return right and now - self._knocked.setdefault(hello.incarnation, now) < KNOCKING_S

    def _and_spares(self) -> str:
        spares = self._most - self._spec.max_nodes
        return f" and {counted(spares, 'spare')}" if spares else ""


def _is_there(agent: Agent, now: float) -> bool:
    """As far as is known: it may have died behind a link that is down."""
    return agent.connected and now - agent.heard < DUPLICATE_S
