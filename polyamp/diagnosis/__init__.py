"""Questions about a run: why it fails, how it goes, and whether it is as accurate. A file for each verb."""
