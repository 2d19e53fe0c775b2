"""Every message between the processes of a run, one file per receiver, and the one codec they travel in.

msgspec records: typed when decoded, no pickle, arrays as raw buffers.
"""
