"""Where files lie: local folders and object stores, durable writes, locks and leases.

May import nothing else of the package but its errors.
"""
