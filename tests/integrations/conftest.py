"""ultralytics writes its settings into a folder of the suite, and installs and shows nothing."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics-"))
os.environ["YOLO_AUTOINSTALL"] = os.environ["YOLO_VERBOSE"] = "false"
