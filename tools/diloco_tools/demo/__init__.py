"""diloco-demo: a small GPT trained by one broker and two workers, compared with single workers."""
