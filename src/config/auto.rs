//! `exposure.auto`: rules that export Services by labels, with Kubernetes' selectors.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::define::{MaybeEmpty, Shape, Type, section, words};
use crate::yaml::Value;

section! {
    /// A rule that exports Services without objects of their own. At least one of `namespaces` and
    /// `services` is given.
    pub struct AutoExport at "exposure.auto[]", check(check) {
        /// Namespaces whose Services are exported. Other labels than `kubernetes.io/metadata.name`
        /// need the Namespace objects in the files.
        namespaces: Option<Selector> = default(None, "every namespace")
            unless json!({"required": ["services"]});
        /// Services that are exported.
        services: Option<Selector> = default(None, "every Service of `namespaces`");
        /// Services that are not exported in spite of the other keys.
        except: Option<Selector> = default(None, "none");
    }
}

/// A selector of labels: all requirements must hold. There is at least one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Selector(Vec<Requirement>);

section! {
    /// Keys of a selector.
    pub(super) struct SelectorKeys at "exposure.auto[] selector" {
        /// Labels with their values.
        labels ["matchLabels"]: Vec<Requirement> as Labels = default(Vec::new(), "none")
            unless json!({"required": ["matchExpressions"]});
        /// Requirements of labels.
        expressions ["matchExpressions"]: Vec<Requirement> = default(Vec::new(), "none");
    }
}

section! {
    /// A requirement of one label.
    pub(super) struct Requirement at "matchExpressions[]", check(check_requirement) {
        /// Key of the label.
        key: String = required("team");
        /// Comparison with `values`.
        operator: Operator = required("In");
        /// Values of the label, of `In` and `NotIn`.
        values: Vec<Arc<str>> as Vec<MaybeEmpty> = default(Vec::new(), "none")
            unless json!({"properties": {"operator": {"enum": ["Exists", "DoesNotExist"]}}});
    }
}

words! {
    /// Comparison of a label with values.
    pub(super) enum Operator {
        /// The label has one of the values.
        In = "In",
        /// The label is absent or has another value.
        NotIn = "NotIn",
        /// The label is there.
        Exists = "Exists",
        /// The label is absent.
        DoesNotExist = "DoesNotExist",
    }
}

impl AutoExport {
    /// Returns whether the rule exports a Service with these labels in a namespace with those.
    pub fn exports<'a>(
        &self,
        namespace: impl Fn(&str) -> Option<&'a str>,
        service: impl Fn(&str) -> Option<&'a str>,
    ) -> bool {
        let namespaces = self.namespaces.as_ref();
        let in_namespace = namespaces.is_none_or(|selector| selector.matches(namespace));
        let services = self.services.as_ref();
        let is_left_out = self.except.as_ref().is_some_and(|one| one.matches(&service));
        in_namespace && !is_left_out && services.is_none_or(|one| one.matches(&service))
    }
}

impl Selector {
    /// Returns whether all requirements are about this label.
    pub fn is_about(&self, label: &str) -> bool {
        self.0.iter().all(|requirement| requirement.key == label)
    }

    /// Returns whether labels match; `label` looks one up by its key. As in Kubernetes, an absent
    /// label is in no list.
    pub fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|requirement| {
            let value = label(&requirement.key);
            let is_listed = || requirement.values.iter().any(|one| Some(&**one) == value);
            match requirement.operator {
                Operator::In => is_listed(),
                Operator::NotIn => !is_listed(),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

fn check(rule: AutoExport, value: Value<'_>) -> Option<AutoExport> {
    if rule.namespaces.is_none() && rule.services.is_none() {
        let how = "`{services: {matchLabels: {KEY: VALUE}}}`, or `exposure.default: all`";
        value.error("selects no Service by itself", how);
        return None;
    }
    Some(rule)
}

fn check_requirement(requirement: Requirement, value: Value<'_>) -> Option<Requirement> {
    let needs_values = matches!(requirement.operator, Operator::In | Operator::NotIn);
    if needs_values != requirement.values.is_empty() {
        return Some(requirement);
    }
    if needs_values {
        value.error("has no `values`", "`values: [VALUE]`");
    } else {
        let what = "has `values`, which its operator does not use";
        value.error(what, "it without them");
    }
    None
}

impl Type for Selector {
    type Out = Self;

    fn read(value: Value<'_>) -> Option<Self> {
        let SelectorKeys { mut labels, expressions } = SelectorKeys::read(value)?;
        labels.extend(expressions);
        if labels.is_empty() {
            let how = "`{matchLabels: {KEY: VALUE}}`, or remove the key";
            value.error("is empty, which would select everything", how);
            return None;
        }
        Some(Self(labels))
    }

    fn show(out: &Self) -> Json {
        json!(out)
    }

    fn shape() -> Shape {
        SelectorKeys::shape()
    }
}

/// Labels with their values, as requirements.
pub(in crate::config) enum Labels {}

impl Type for Labels {
    type Out = Vec<Requirement>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        if !value.is_map() {
            value.error("is not a map", "`{KEY: VALUE}`");
            return None;
        }
        let read = value.pairs().map(|(entry, value)| {
            Some(Requirement {
                key: entry.key.to_string(),
                operator: Operator::In,
                values: vec![value.text_or_empty()?.into()],
            })
        });
        read.collect::<Vec<_>>().into_iter().collect()
    }

    fn show(out: &Self::Out) -> Json {
        json!(out)
    }

    fn shape() -> Shape {
        Shape::Pairs(Box::new(MaybeEmpty::shape()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::yaml::Document;
    use crate::yaml::Report;

    fn read(text: &str) -> Result<AutoExport, String> {
        let document = Document::parse(Path::new("a.yaml"), text).unwrap();
        let report = Report::new(document.file());
        let read = AutoExport::read(Value::of_document(&document, &report));
        read.ok_or_else(|| report.into_findings().to_string())
    }

    /// Returns true if a rule exports a Service; labels are `KEY=VALUE KEY=VALUE`.
    fn exports(rule: &str, namespace: &'static str, service: &'static str) -> bool {
        let find = |labels: &'static str, key: &str| {
            let mut labels = labels.split(' ').filter_map(|one| one.split_once('='));
            labels.find(|(one, _)| *one == key).map(|(_, value)| value)
        };
        let rule = read(rule).unwrap();
        rule.exports(|key| find(namespace, key), |key| find(service, key))
    }

    #[test]
    fn a_rule_exports_what_all_its_selectors_fit() {
        let both = "{namespaces: {matchLabels: {team: a}}, services: {matchLabels: {tier: web}}}";
        for (namespace, service, want) in [
            ("team=a", "tier=web", true),
            ("team=b", "tier=web", false),
            ("team=a", "tier=db", false),
            ("", "", false),
        ] {
            assert_eq!(exports(both, namespace, service), want, "{namespace} {service}");
        }
        let except = "{namespaces: {matchLabels: {a: b}}, except: {matchLabels: {own: true}}}";
        assert!(exports(except, "a=b", ""));
        assert!(!exports(except, "a=b", "own=true"));
    }

    #[test]
    fn operators_mean_what_they_mean_in_kubernetes() {
        for (expression, service, want) in [
            ("operator: In, values: [x, y]", "a=y", true),
            ("operator: In, values: [x, y]", "a=z", false),
            ("operator: In, values: [x, y]", "", false),
            ("operator: NotIn, values: [x]", "a=y", true),
            ("operator: NotIn, values: [x]", "a=x", false),
            ("operator: NotIn, values: [x]", "", true),
            ("operator: Exists", "a=", true),
            ("operator: Exists", "b=x", false),
            ("operator: DoesNotExist", "b=x", true),
            ("operator: DoesNotExist", "a=", false),
        ] {
            let rule = format!("services: {{matchExpressions: [{{key: a, {expression}}}]}}");
            assert_eq!(exports(&rule, "", service), want, "{expression} {service}");
        }
    }
}
