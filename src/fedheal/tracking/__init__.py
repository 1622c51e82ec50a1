"""Log runs to TensorBoard, MLflow or Weights & Biases."""
