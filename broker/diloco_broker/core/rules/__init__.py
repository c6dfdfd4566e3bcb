"""The rules: functions over one `RunState` that yield the effects to carry out.

joining/       who joins, what it may ask for        liveness      heartbeats, stalls, deaths
initial_model  where the first parameters come from  donation      their chunks
pushes         what is checked of a push             grants        what it is answered
rounds         opening, closing, releasing           round_lines   the log's line for each
reducers/      what differs between the ways         norms         pushes that are too long
pulls          who reads versions                    checkpoints   when the run is saved
operator       what operators ask for                settings      what they may change
orders         what is asked of all workers          data/         units of the work queue
sites/         what is asked of relays               standby/      what needs a hub's lease
ending         when the run is over                  stopping      how the broker ends
refusals       what cannot be accepted
"""
