"""What a run says to people: live table and curves, trackers, a folder with a model card."""
