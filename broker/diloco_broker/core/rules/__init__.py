"""The rules: functions over one `RunState` that yield the effects to carry out.

admission       who joins, comes back, goes            compatibility  what a worker may ask for
liveness        heartbeats, stalls, deaths             refusals       what cannot be accepted
initial_model   where the first parameters come from   donation       their chunks
pushes          what is checked of a push              grants         what it is answered
rounds          opening, closing, releasing            reducers       what differs between the ways
pulls           who reads versions                     checkpoints    when the run is saved
operator        what operators ask for                 settings       what they may change
stopping        how the broker ends
"""
