"""Who is next: first come first served, by priority, or fair among tenants. Torch-free.

Fair is the virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588): every tenant has a counter of the service
it got (a token read weighs 1, a token written 2), and the waiting tenant with the smallest counter is next. A tenant
that comes back after a pause is lifted to the smallest counter of those that waited meanwhile: idling saves nothing up.
Within a tenant, and in the other policies among equals, the earlier arrival is first. A request that was preempted
stands before all that have never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from perilune.config import SchedulingPolicy
from perilune.sched.state import RequestState

READ_WEIGHT: Final = 1
WRITE_WEIGHT: Final = 2


class WaitingQueue:
    """Requests that wait to run.

    Queues are short against a step's cost (they are bounded where requests enter), so a plain list is scanned.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.served: dict[str, int] = {}
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    @property
    def num_tokens(self) -> int:
        """Tokens still to be computed for those that wait."""
        return sum(len(state.tokens) for state in self._states)

    def push(self, state: RequestState, active: set[str]) -> None:
        """Adds a request. ``active``: tenants that have requests running."""
        tenant = state.request.tenant
        waiting = {other.request.tenant for other in self._states}
        if self.policy == "fair" and tenant not in waiting | active:
            floor = min((self.served.get(other, 0) for other in waiting | active), default=self._last_served())
            self.served[tenant] = max(self.served.get(tenant, 0), floor)
        self._states.append(state)

    def _last_served(self) -> int:
        """Where nobody is active the newcomer starts level with the least served tenant that is known."""
        return min(self.served.values(), default=0)

    def peek(self) -> RequestState | None:
        """The next request, left in its place."""
        return min(self._states, key=self._rank, default=None)

    def remove(self, state: RequestState) -> None:
        """Takes a request out."""
        self._states.remove(state)

    def charge(self, tenant: str, *, read: int = 0, written: int = 0) -> None:
        """Counts service."""
        if self.policy == "fair":
            self.served[tenant] = self.served.get(tenant, 0) + READ_WEIGHT * read + WRITE_WEIGHT * written

    def _rank(self, state: RequestState) -> tuple[int, int, int]:
        resumes = 0 if state.preemptions else 1
        if self.policy == "priority":
            return (state.request.priority, resumes, state.arrival)
        if self.policy == "fair":
            return (resumes, self.served.get(state.request.tenant, 0), state.arrival)
        return (resumes, 0, state.arrival)
