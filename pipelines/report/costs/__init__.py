"""What a score costs: parameters, time, bytes; what compressed encoders keep of it."""
