"""`cudal1 run`: a program of the user's, in this process."""
