"""Profiles of models, as `shoal advise`, `shoal sim step` and `shoal bench step` read them. shoal.torch.profile and
shoal.tensorflow.profile measure them."""
from __future__ import annotations

import dataclasses
import json
import pathlib

NAME_BYTES = 95  # the longest name in a file


@dataclasses.dataclass
class Gradient:
    """A parameter whose gradient is complete after the share `ready` of the backward pass. `index` is its number among the
    parameters that are trained."""
    name: str
    elements: int
    ready: float
    index: int


@dataclasses.dataclass
class Profile:
    """What was measured on one worker. `activation_bytes` are those of one sample, as if all floating-point values had 32 bits.
    `activation_16_bytes` are those of a model with 16 bits as it keeps them; 0 if it has others. `recomputed_bytes` are
    `activation_bytes` if each repeated layer is recomputed; 0 if that is not known. `gradients` are in the order in which they
    become ready."""
    name: str
    batch: int
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    batch_norms: int
    gradients: list
    activation_16_bytes: float = 0
    recomputed_bytes: float = 0

    def save(self, file) -> None:
        """Writes a file for `--profile` of `shoal advise`, `shoal sim step` and `shoal bench step`."""
        facts = {"profile": self.name, "batch": self.batch, "forward_ms": self.forward_ms, "backward_ms": self.backward_ms,
                 "activation_bytes": self.activation_bytes, "batch_norms": self.batch_norms}
        facts |= {key: getattr(self, key) for key in ("activation_16_bytes", "recomputed_bytes") if getattr(self, key)}
        lines = [json.dumps(each) for each in (facts, *map(dataclasses.asdict, self.gradients))]
        pathlib.Path(file).write_text("[" + ",\n ".join(lines) + "]\n")


def short(name: str) -> str:
    return name.encode()[-NAME_BYTES:].decode(errors="ignore")


def gradients_of(parameters, shares) -> list:
    """Returns the gradients in the order in which they become ready. `parameters` are pairs of name and elements in the order of
    their registration; of those that are ready at once, the last is first."""
    order = sorted(range(len(parameters)), key=lambda index: (shares[index], -index))
    return [Gradient(short(parameters[index][0]), parameters[index][1], shares[index], index) for index in order]
