"""Parts that every run has: its folder, its subject, its cached stages."""
