"""Several pipelines of one model: what they add up, and how a mini-batch is divided among them."""
