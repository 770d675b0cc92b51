"""What the blocks of this project do on ground that is not theirs."""
