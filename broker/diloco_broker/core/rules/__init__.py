"""What the broker decides: functions over the state, one module for each matter."""
