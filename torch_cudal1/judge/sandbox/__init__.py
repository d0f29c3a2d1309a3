"""Processes for candidates: started confined, spoken to, and killed with everything they started."""
