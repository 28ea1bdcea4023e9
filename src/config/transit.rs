//! `exposure.transit`: use of other networks by tunnels to services whose entries state none.

use serde_json::{Value as Json, json};

use super::define::{NonEmpty, Segment, Shape, Type, section};
use super::line::Line;
use crate::wire::Transit;
use crate::wire::sni::SniPattern;
use crate::yaml::Value;

section! {
    /// Transit of some services, or of all others.
    pub struct TransitRule at "exposure.transit[]", derive(Default), check(check),
        compare(compare)
    {
        /// Hostname of the service, or `*.NAME` for all below it at any depth. One name of a family
        /// stands for all.
        service: Option<SniPattern> = default(None, "every service") since "0.1.0";
        /// Namespace of the services.
        namespace: Option<String> as Option<Segment> = default(
            None, "every namespace") since "0.1.0";
        /// Use of other networks.
        transit: Transit = required("failover") since "0.1.0";
        /// The line, for findings that need the mesh.
        line: Line = aside(Line::of);
    }
}

/// One value for all services, or a list of rules.
pub(super) enum TransitRules {}

impl Type for TransitRules {
    type Out = Vec<TransitRule>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        if value.is_list() {
            return NonEmpty::<TransitRule>::read(value);
        }
        let rule = |transit| TransitRule {
            service: None,
            namespace: None,
            transit,
            line: Line(value.place()),
        };
        let transit = Transit::read(value)?;
        let granted = Some(transit).filter(|transit| *transit > Transit::Off);
        Some(granted.map(rule).into_iter().collect())
    }

    fn show(out: &Self::Out) -> Json {
        match &out[..] {
            [] => json!(Transit::Off.label()),
            [one] if one.service.is_none() && one.namespace.is_none() => {
                Transit::show(&one.transit)
            }
            rules => Vec::<TransitRule>::show(&rules.to_vec()),
        }
    }

    fn shape() -> Shape {
        let rules = Shape::list(TransitRule::shape(), true, false);
        Shape::Either(Box::new([Transit::shape(), rules]))
    }
}

fn check(mut rule: TransitRule, value: Value<'_>) -> Option<TransitRule> {
    rule.service = rule.service.filter(|name| *name != SniPattern::Any);
    if rule.service.is_some() && rule.namespace.is_some() {
        value.error("has both `service` and `namespace`", "one of them");
        return None;
    }
    Some(rule)
}

fn compare(_: Value<'_>, read: &[(TransitRule, Value<'_>)]) {
    for (at, (rule, value)) in read.iter().enumerate() {
        let scope = |of: &TransitRule| (of.service.clone(), of.namespace.clone());
        let mut earlier = read.iter().take(at);
        if let Some((other, _)) = earlier.find(|(other, _)| scope(other) == scope(rule)) {
            let what = format!("is for the same services as line {}", other.line.number());
            value.error(what, "one rule for them");
        }
    }
}
