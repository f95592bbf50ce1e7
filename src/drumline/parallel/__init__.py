"""How ranks work together: rank algebra, shares of the model, process groups and their rendezvous.

``layout`` and ``shards`` are pure and import no torch; ``rendezvous`` neither; ``groups`` does.
"""
