"""python -m talea.prove MODEL: would this model gain, and would it still train the same?

Takes a Hugging Face causal language model from a local folder, or a config with random weights, runs
its output layer and loss dense and fused on the user's text and device, and says what each costs and
how far each is from fp64. Nothing is downloaded and nothing of the model is changed on disk.
"""
