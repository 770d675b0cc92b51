"""Case studies: the project's network blocks on other tasks than choosing algorithms."""
