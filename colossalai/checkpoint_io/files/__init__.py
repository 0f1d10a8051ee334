"""Files of whole tensors, in the layout of Hugging Face."""
