"""Rocket's rivals (its Table 1) on one bank of LoRAs, in one calling form: see `tuning`."""

__all__ = [
    "arrow",
    "lorahub",
    "mixlora",
    "pems",
    "phatgoose",
    "pi_tuning",
    "poly",
    "rocket",
    "smear",
    "tuning",
    "vanilla",
]
