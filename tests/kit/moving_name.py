"""A broker whose name leads elsewhere after it has moved; run where `/etc/hosts` is one's own.

python moving_name.py
"""

from pathlib import Path

from diloco_broker import Broker, BrokerConfig
from diloco_worker import DiLoCoClient

HOSTS = Path("/etc/hosts")
PORT = 18777


with DiLoCoClient(f"tcp://moving:{PORT}", timeout=30.0) as client:
    for host in ("127.0.0.2", "127.0.0.3"):
        HOSTS.write_text(f"127.0.0.1 localhost\n{host} moving\n")
        config = BrokerConfig(save_dir=None, bind=f"tcp://{host}:{PORT}", feed="tcp://127.0.0.1:*")
        with Broker(config) as broker:
            client.status()
            print(f"answers at {broker.address}", flush=True)
