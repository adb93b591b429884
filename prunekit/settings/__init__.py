"""Settings of a job and of all its parts, as frozen dataclasses that check themselves."""
