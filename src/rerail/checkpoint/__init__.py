"""Durable state: what a job is made of, how it gets to disk without being waited for, and how it is read back.

names, manifest, header     what lies on disk, and what makes it valid
tiers, files, objects       where it lies: directories and object stores behind one small protocol
arena, staging              shared memory between the trainer and the persister
persister, saving           the process that writes; one save from slot to COMMIT
catalog, reading, reshard   which checkpoint counts, verified reads of the byte ranges that are needed
schedule, retention         when to save, what to keep
"""
