"""Speed of asynccoll beside its peers. Knows the public interface of asynccoll, and none of its insides."""
