"""Rocket's rivals (its Table 1) on one bank of LoRAs, in one calling form: see `tuning`."""
