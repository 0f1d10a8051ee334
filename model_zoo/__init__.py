"""The zoo under the name and with the arguments of the older documents; the models themselves are in
``titans``.
"""
