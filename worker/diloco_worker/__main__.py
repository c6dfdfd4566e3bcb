"""`python -m diloco_worker`: the command `diloco-worker`."""

from diloco_worker.cli.app import app

if __name__ == "__main__":
    app(prog_name="diloco-worker")
