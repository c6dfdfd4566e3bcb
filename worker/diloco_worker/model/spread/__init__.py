"""A model whose values are spread over the processes of one worker."""
