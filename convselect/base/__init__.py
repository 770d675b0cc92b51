"""What everything else stands on, and which stands on nothing of ours."""
