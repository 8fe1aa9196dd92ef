"""Golden values of FedUCH and its bases, each computed by the project's own functions."""

from __future__ import annotations

from typing import Any

import torch

from fedmq.models.hash_networks import signs
from fedmq.models.two_tower import Out
from protocols import feduch
from protocols.objectives import dgcpn, djsrh, jdsh
from protocols.parts import aggregation
from protocols.parts.losses import unit
from tests.golden_checks import Check, Inputs, compare_all, t

NUS = djsrh.Options(beta=0.6)
WIKI = djsrh.Options(beta=0.3, lambda1=0.3, lambda2=0.3)
CODE, PAPER = dgcpn.Options(), dgcpn.Options(form="paper")


def graph(x: Inputs) -> dgcpn.Graph:
    return dgcpn.Graph(unit(t(x["FI"])), unit(t(x["FT"])))


def everything(x: Inputs) -> torch.Tensor:
    return torch.arange(len(x["FI"]))


def neighbour(x: Inputs) -> torch.Tensor:
    rows = everything(x)
    return graph(x).agreement(rows, graph(x).pairs(rows))


def codes(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return t(x["HV"]), t(x["HT"])


def batch_similarity(x: Inputs) -> torch.Tensor:
    return graph(x).similarity(torch.from_numpy(x["idx"]))


def base_loss(x: Inputs, options: dgcpn.Options = CODE) -> torch.Tensor:
    return dgcpn.loss(*codes(x), batch_similarity(x), options)


def three_steps(x: Inputs) -> torch.Tensor:
    image, text = codes(x)
    pairs = [(image, text), (image, signs(text)), (signs(image), text)]
    return torch.stack([dgcpn.loss(*pair, batch_similarity(x), dgcpn.Options()) for pair in pairs])


def batch(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return t(x["FI"])[x["idx"]], t(x["FT"])[x["idx"]]


def reconstruction(x: Inputs, base: Any, options: Any) -> torch.Tensor:
    return base.loss(*codes(x), base.target(*batch(x), options), options)


def contrast(x: Inputs, anchor: str, tau: float | None = None, previous: str = "_prev") -> torch.Tensor:
    chosen = float(x["tau"]) if tau is None else tau
    both = feduch.cross_modal_contrast(outs(x, ""), outs(x, "_G"), outs(x, previous), chosen)
    return both["VT".index(anchor)]


def distilled(x: Inputs, modality: str, temperature: float | None = None) -> torch.Tensor:
    options = feduch.FedUchOptions(kd_temperature=float(x["T"]) if temperature is None else temperature)
    return feduch.distillation(outs(x, ""), outs(x, "_G"), options)["VT".index(modality)]


def outs(x: Inputs, suffix: str) -> tuple[Out, Out]:
    """Image and text outputs; the codes of the previous networks are not used."""
    made = []
    for modality in ("V", "T"):
        hidden = t(x[f"Z{modality}{suffix}"])
        code = t(x[f"H{modality}{suffix}"]) if suffix != "_prev" else hidden
        made.append(Out(hidden, code, code))
    return made[0], made[1]


def local_loss(x: Inputs, **switches: bool) -> torch.Tensor:
    options = feduch.FedUchOptions(
        mu=float(x["mu"]), phi=float(x["phi"]), contrast_tau=float(x["tau"]), kd_temperature=float(x["T"]), **switches
    )
    previous = outs(x, "_prev") if options.contrast else None
    added = feduch.terms(outs(x, ""), outs(x, "_G"), previous, options)
    return base_loss(x) if added is None else base_loss(x) + added


def averaged(x: Inputs, silos: list[int]) -> torch.Tensor:
    weights = aggregation.sample_weights([int(x["n_k"][silo]) for silo in silos])
    return aggregation.weighted_sum([t(x["theta"])[silo] for silo in silos], weights)


CHECKS: dict[str, Check] = {
    "dgcpn_S": lambda x: graph(x).similarity(everything(x)),
    "dgcpn_S_pair": lambda x: graph(x).pairs(everything(x)),
    "dgcpn_S_neighbour": neighbour,
    "dgcpn_code": base_loss,
    "dgcpn_code_terms": lambda x: torch.stack(dgcpn.terms_of_code(*codes(x), batch_similarity(x), 1.5)),
    "dgcpn_paper": lambda x: base_loss(x, PAPER),
    "dgcpn_paper_terms": lambda x: torch.stack(dgcpn.terms_of_paper(*codes(x), batch_similarity(x), 1.5)),
    "dgcpn_three_steps": three_steps,
    "djsrh": lambda x: reconstruction(x, djsrh, djsrh.Options()),
    "djsrh_S": lambda x: djsrh.target(*batch(x), djsrh.Options()),
    "djsrh_nus": lambda x: reconstruction(x, djsrh, NUS),
    "djsrh_wiki": lambda x: reconstruction(x, djsrh, WIKI),
    "jdsh": lambda x: reconstruction(x, jdsh, jdsh.Options()),
    "jdsh_S": lambda x: jdsh.target(*batch(x), jdsh.Options()),
    "eq11_image": lambda x: contrast(x, "V"),
    "eq11_text": lambda x: contrast(x, "T"),
    "eq11_image_tau0.5": lambda x: contrast(x, "V", tau=0.5),
    "eq11_first_round": lambda x: contrast(x, "V", previous="_G"),
    "eq12_image": lambda x: distilled(x, "V"),
    "eq12_text": lambda x: distilled(x, "T"),
    "eq12_image_T1": lambda x: distilled(x, "V", temperature=1.0),
    "eq14": local_loss,
    "feduch_1": lambda x: local_loss(x, contrast=False, distill=False),
    "feduch_2": lambda x: local_loss(x, distill=False),
    "feduch_3": lambda x: local_loss(x, contrast=False),
    "eq3_theta": lambda x: averaged(x, [0, 1, 2]),
    "eq3_theta_silos_0_2": lambda x: averaged(x, [0, 2]),
}


def test_golden_feduch() -> None:
    compare_all("feduch", CHECKS)
