"""Images with boxes: data sets in the formats of COCO and YOLO, drawn shapes, and augmentation that moves boxes."""
