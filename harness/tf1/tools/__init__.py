"""The command lines, and modules of TensorFlow that are written in its names: data sets, models, decoders."""
