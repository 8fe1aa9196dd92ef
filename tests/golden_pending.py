"""Golden values that nothing in the project computes yet, with the reason; the one list of them.

Whoever builds the method takes its keys out of here and adds them to a test_golden module. test_golden_coverage.py
fails for a key that is in neither place, or in both.
"""

from __future__ import annotations

#: file -> reason why none of its keys is checked.
FILES: dict[str, str] = {
    "fedcafe": "FedCAFE is not built yet",
    "fedhap": "FedHAP is not built yet",
    "fedscmr": "FedSCMR is not built yet",
    "feduch": "FedUCH is not built yet",
}

_PERSONAL = "RCSR-p, the personal adapter, is the next issue"
_HASH = "hashing networks with class codes (SHDCH, PLFedCMH) are not built yet"

#: file -> key -> reason.
KEYS: dict[str, dict[str, str]] = {
    "rcsr": dict.fromkeys(("eq12_A", "eq12_z", "eq12_loss_paired", "eq13_s_grid", "eq13_s_cap"), _PERSONAL),
    "baselines": {
        **dict.fromkeys(("fedprox", "fedprox_grad"), "FedProx is not built yet"),
        **dict.fromkeys(("moon_buffer1", "moon_buffer2", "moon_first"), "MOON is not built yet"),
        **dict.fromkeys(
            (
                "fedproto_local",
                "fedproto_counts",
                "fedproto_uniform",
                "fedproto_valid",
                "fedproto_weighted",
                "fedproto_loss",
            ),
            "FedProto is not built yet",
        ),
        **dict.fromkeys(("fedcmr_weights", "fedcmr_global", "fedcmr_local"), "FedCMR is not built yet"),
        **dict.fromkeys(("shdch", "shdch_Y1_new", "shdch_after_Y1", "plfedcmh_batch", "plfedcmh_mix"), _HASH),
        **dict.fromkeys(("creamfl_w", "creamfl_agg", "creamfl_inter", "creamfl_intra"), "CreamFL is not built yet"),
        **dict.fromkeys(("kl_T3", "kl_T1"), "FedMEKT is not built yet"),
        **dict.fromkeys(("pfedmma_0.5", "pfedmma_0.001"), "pFedMMA is not built yet"),
        **dict.fromkeys(("proto_contrast", "proto_l2"), "MFCPL is not built yet"),
    },
}
