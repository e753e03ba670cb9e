"""What the logs of finished or running trainings say: read, summed up, drawn, and put on a page."""
