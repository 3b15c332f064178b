"""`tiered-kv bench`: what a machine's tiers reach, what deciding costs, and when a load pays."""
