from shardkit.keys.check import compare_with_base, own_names_warnings


def test_lists_every_difference() -> None:
    compared = compare_with_base(
        {"a": (2, 3), "b": (4,), "extra": (1,)}, {"a": (2, 3), "b": (5,), "gone": (1,), "lost": ()}
    )
    assert compared.missing == ("gone", "lost")
    assert compared.unexpected == ("extra",)
    assert compared.wrong_shapes == (("b", (5,), (4,)),)
    assert not compared.is_equal


def test_a_tie_makes_good_what_one_side_lacks() -> None:
    ties = [("embed", "head")]
    both, one = {"embed": (4, 2), "head": (4, 2)}, {"embed": (4, 2)}
    assert compare_with_base(one, both, ties=ties).is_equal
    assert compare_with_base(one, both, ties=ties).missing == ()
    assert compare_with_base(both, one, ties=ties).is_equal
    assert not compare_with_base(both, one).is_equal
    assert compare_with_base({}, both, ties=ties).missing == ("embed", "head")


def test_the_type_in_the_config_tells_the_hubs_names_from_torchtitans() -> None:
    names = ["layers.0.attention.wq.weight", "tok_embeddings.weight"]
    assert own_names_warnings(names, None, "mistral_large4") == ()
    for model_type in ("llama", None, ["mistral_large4"]):
        (said,) = own_names_warnings(names, None, model_type)
        assert said.startswith("the names are torchtitan's own")


def test_megatrons_embedding_is_not_that_of_berts_decoder() -> None:
    """`EncoderDecoderModel` of two BERTs keeps one of them under `decoder.`."""
    assert own_names_warnings(["decoder.bert.embeddings.word_embeddings.weight"], None) == ()
    for name in ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        (said,) = own_names_warnings([name], None)
        assert said.startswith("the names are Megatron's own")
