"""Cache geometries read from Hugging Face configs.

`from_config` reads a config and finds its family in the tables: `families` has a line for each
model file of mlx-lm, `wrappers` those around a text model. A line names the order of layer kinds
(`layer_types`) and the row shape (`row_shapes`), or a rule of the family's own: in
`attention_rules`, in `layer_map_rules` where layers own several caches or read those of others,
in `recurrent_rules` where layers keep a state. `attended` has what a model attends where mlx-lm's
caches keep more, `layer_overrides` what single layers have of their own. `unlisted_rule` serves
every other model_type.
"""
