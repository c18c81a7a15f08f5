"""What each lane has to do for one unit, in seconds: the form in which `costs` hands it to `timeline` and `search`."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from zero_offload.plan.hardware import Lane


@dataclass(frozen=True)
class Fetch:
    """Bringing a unit's values: read, uploaded, gathered, and what was gathered kept."""

    read_s: float = 0.0
    upload_s: float = 0.0
    gather_s: float = 0.0
    keep_download_s: float = 0.0
    keep_write_s: float = 0.0

    def times(self, count: int) -> Fetch:
        return Fetch(*(count * seconds for seconds in astuple(self)))


NO_FETCH = Fetch()


@dataclass(frozen=True)
class UpdateCosts:
    """Of all of a unit's pieces together."""

    pieces: int = 0
    """0 is no update on the host."""
    read_s: float = 0.0
    download_s: float = 0.0
    host_s: float = 0.0
    write_s: float = 0.0
    is_staged: bool = False
    """Whether chunks pass through the pipeline's staging."""
    device_upload_s: float = 0.0
    device_read_s: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True)
class UnitCosts:
    forward_s: float
    backward_s: float
    buffer_bytes: int
    """Of compute memory while the unit is there; 0 if it always is."""
    first: Fetch
    """After an update."""
    again: Fetch
    """Until the next one."""
    delivered: bool
    """An update writes new values into the unit's pages, if it has some."""
    reduce_s: float
    """Of each backward."""
    late_reduce_s: float
    """Once, before the step."""
    grad_download_s: float
    grad_write_s: float
    grad_read_s: float
    """To add to what is there: of each backward that adds."""
    land_s: float
    saved_out: Fetch
    """Activations that leave: `keep_download_s` and `keep_write_s`; and come back: `read_s`, `upload_s`."""
    update: UpdateCosts
    commit_s: float
    """Written for a generation."""

    def taking_turns(self, count: int) -> UnitCosts:
        """Of so many micro-batches together, whose gradients leave once."""
        if count == 1:
            return self
        return replace(
            self,
            forward_s=count * self.forward_s,
            backward_s=count * self.backward_s,
            saved_out=self.saved_out.times(count),
            grad_read_s=0.0,
            land_s=0.0,
        )

    def lane_seconds(self, num_passes: int) -> dict[Lane, float]:
        """The least that each lane does in a step: values are fetched once."""
        n, fetch, update, saved = num_passes, self.first, self.update, self.saved_out
        return {
            Lane.COMPUTE: n * (self.forward_s + self.backward_s) + update.device_s,
            Lane.UPLOAD: fetch.upload_s + update.device_upload_s + n * saved.upload_s,
            Lane.DOWNLOAD: n * (self.grad_download_s + saved.keep_download_s)
            + update.download_s
            + fetch.keep_download_s,
            Lane.READ: (fetch.read_s if not self.delivered else 0.0)
            + update.read_s
            + update.device_read_s
            + n * saved.read_s,
            Lane.WRITE: n * (self.grad_write_s + saved.keep_write_s)
            + update.write_s
            + self.commit_s
            + fetch.keep_write_s,
            Lane.HOST: update.host_s + n * self.land_s,
            Lane.NETWORK: n * self.reduce_s + self.late_reduce_s + fetch.gather_s,
        }
