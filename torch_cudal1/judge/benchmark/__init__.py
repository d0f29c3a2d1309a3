"""How time is measured: the one clock, paired samples, statistics. It knows no verdict."""
